"""Registers the faults in a process: verl imports it by `VERL_USE_EXTERNAL_MODULES`."""

import rehearsal_faults
import rehearsal_hangs

rehearsal_faults.install()
rehearsal_hangs.install()

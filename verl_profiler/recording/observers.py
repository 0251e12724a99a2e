"""What watches calls, spans and turns as they begin and end: `instrumentation.nvtx_ranges`, or nothing.

The choice is made once per process.  Where nobody watches, a call costs one comparison more.
"""

from __future__ import annotations

from typing import Any

current: Any = None

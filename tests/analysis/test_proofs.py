"""The condition that a finding offers as its proof fails on the run that has the finding."""

import json
import re
import shlex

import pytest
from cached_runs import cached

from verl_profiler.cli import main


@pytest.mark.parametrize("name", ["rehearsal_run", "critic_run"])
def test_a_proof_fails_before_the_fix(name, capsys):
    """Validation after the last step counts in diff, as it does in the finding."""
    run = str(cached(name))
    assert 0 == main(["summary", run, "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    proofs = {row["finding"]: shlex.split(row["proof"])[-2:] for row in findings if row["proof"]}

    assert "validation" in proofs
    assert 1 == main(["diff", run, run, *(word for words in proofs.values() for word in words)])
    reported = re.findall("^(passed|FAILED):", capsys.readouterr().out, re.MULTILINE)
    assert ["FAILED"] * len(proofs) == reported

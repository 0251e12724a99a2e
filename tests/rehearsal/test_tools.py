"""The rehearsal's tools, loaded and called as verl's agent loop loads and calls them."""

import asyncio
from types import SimpleNamespace

import pytest

from verl_profiler.rehearsal import assets, latency

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("_import_path")]


@pytest.fixture
def tools(monkeypatch, capsys):
    """Both tools by name, with latencies of zero."""
    registry = pytest.importorskip("verl.tools.tool_registry")
    loaded = registry.load_all_tools(str(assets.TOOL_CONFIG), str(assets.FUNCTION_TOOLS))
    capsys.readouterr()
    monkeypatch.setattr(latency, "latency_s", lambda *_, **__: 0.0)
    return {tool.name: tool for tool in loaded}


def test_both_ways_of_loading_work_together(tools):
    """verl refuses two tools of one name, and a function that is registered twice."""
    assert {"calculate", "check_answer"} == set(tools)


@pytest.mark.parametrize(
    ("expression", "answer"),
    [("12+30", "42"), (" 1 + 2 + 3 ", "6"), ("7", "7"), ("1-2", "cannot calculate '1-2'")],
)
def test_calculate_adds(tools, expression, answer):
    """Whatever the model writes is answered with text."""
    assert answer == asyncio.run(tools["calculate"].call({"expression": expression}))


def test_check_answer_compares_with_the_prompts_ground_truth(tools):
    """The truth comes with `tools_kwargs`, the reward goes back with the answer."""
    tool = tools["check_answer"]
    request = SimpleNamespace(request_id="r1")

    async def call(answer):
        instance, _ = await tool.create(create_kwargs={"ground_truth": "42"})
        response = await tool.execute(instance, {"answer": answer}, agent_data=request)
        await tool.release(instance)
        return response

    async def both():
        return await call("41"), await call("42")

    wrong, right = asyncio.run(both())

    assert ("wrong, try 1", 0.0, {"tries": 1}) == (wrong[0].text, *wrong[1:])
    assert ("right", 1.0, {"tries": 2}) == (right[0].text, *right[1:])


def test_release_forgets(tools):
    """What a call needs does not outlive it."""
    tool = tools["check_answer"]

    async def call():
        instance, _ = await tool.create(create_kwargs={"ground_truth": "1"})
        await tool.release(instance)

    asyncio.run(call())

    assert {} == tool._ground_truth

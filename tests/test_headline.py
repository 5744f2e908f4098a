"""The README's picture and findings: what they say is what the records say."""

import re

import pytest

from study.records import runs as records
from study.report import headline, readme, style
from study.spec.arms import ROOT

KEPT = ROOT / "reports" / "cpu-2core" / "runs"


@pytest.fixture(scope="module")
def kept():
    return records.load([KEPT / "smoke", KEPT / "at_scale"])


def test_findings_and_picture_have_the_records_numbers(kept):
    """Recomputed from the records themselves, without the tables that the picture is drawn from."""
    answer = headline.of(kept)
    at_scale = {run.arm: run for run in kept.done if run.folder.name.startswith("llama3-8b") and run.checkpointing}
    text = " ".join(headline.findings(answer, []))
    for arm in ("zero1", "zero2", "zero3"):
        assert f"{at_scale[arm].tracked_bytes / 1e9:.1f} GB under stage {arm[-1]}" in text
    assert at_scale["ddp"].tracked_bytes > at_scale["zero1"].tracked_bytes > at_scale["zero3"].tracked_bytes
    drawn = re.findall(r"<text[^>]*>([^<]+)</text>", style.svg(headline.picture(answer), "x"))
    assert {f"{run.tracked_bytes / 1e9:.0f}" for run in at_scale.values()} <= set(drawn)
    sent = sum(at_scale["zero2"].traffic[kind] * times for kind, times in (("all_reduce", 2), ("all_gather", 1)))
    assert headline.sent(answer)["zero2"] == pytest.approx(sent / (2 * 2 * at_scale["zero2"].parameters), rel=0.01), (
        "over an all-reduce of 16-bit gradients"
    )


def test_where_a_panel_lacks_its_records_there_is_no_picture(kept):
    losses_alone = kept.select(virtual=False)
    assert headline.of(losses_alone) is None
    text = readme.answers("runs", readme.Judged(losses_alone, []))
    assert "headline" not in text

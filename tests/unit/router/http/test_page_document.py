"""What the page does with its document, in Node: what no test in a browser can bring about."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.browsers.node_page import told_by_node
from tests.support.programs import needs

pytestmark = needs("node")

EDIT = """
import { byId } from "./document.js";
import { Reader } from "./reader.js";
const words = [" かな", " と"].map((text, i) => ({ text, start: i, end: i + 1, probability: 1 }));
const segments = [{ start: 0, end: 2, text: " かな と", words }];
const job = { state: "done", name: "a.wav", segments, timing: "", language: "japanese" };
new Reader().show(job);
const text = byId("transcript").querySelector(".words");
text.fire("dblclick");
text.textContent = "漢字";
const told = [];
for (const event of asked) {
  text.fire("keydown", event);
  told.push([text.hasAttribute("contenteditable"), job.segments[0].text]);
}
console.log(JSON.stringify(told));
"""


@pytest.mark.parametrize("composing", [{"isComposing": True}, {"keyCode": 229}])
def test_enter_that_ends_a_composition_goes_on_with_the_edit(
    tmp_path: Path, composing: dict[str, object]
) -> None:
    """As Japanese and Chinese are written; Safari tells it by the key's code alone."""
    enter = {"key": "Enter"}
    told = told_by_node(tmp_path, EDIT, [enter | composing, enter])
    assert told == [[True, " かな と"], [False, " 漢字"]]

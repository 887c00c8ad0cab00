"""The README's example prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_example_prints_what_is_shown(code, printed):
    if "import torch" in code:
        pytest.importorskip("torch")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, str(README), "exec"), {})
    assert output.getvalue() == printed


def test_there_is_an_example():
    assert EXAMPLES

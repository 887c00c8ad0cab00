"""The README's example prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from helpers import output_of

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


@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_examples_work_in_the_order_that_formatters_leave(code, printed):
    """isort and ruff sort imports: dpnp and dpctl come before kvcache_dpex."""
    lines = code.splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    assert imports == sorted(imports, key=lambda line: line.split()[1].lower())
    if "import torch" in code:
        pytest.importorskip("torch")
    assert output_of(code) == printed.strip()


def test_there_are_examples():
    assert len(EXAMPLES) >= 3

"""README's examples print what README says, also after an import sorter has been over them."""

import contextlib
import io
import re

import pytest

from helpers import ROOT, output_of

README = ROOT / "README.md"
EXAMPLES = re.findall(r"```python\n([^`]*)```\n+```text\n([^`]*)```", README.read_text())
GENERATION = re.findall(
    r"```python\n(from kvcache_dpex.transformers.*?)```", README.read_text(), flags=re.DOTALL
)

# A model of random weights and words for tokens, in a folder of this name.
MODEL = """
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
words = {word: number for number, word in enumerate("? Keys and values are kept in".split())}
plain = Tokenizer(models.WordLevel(words, unk_token="?"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?").save_pretrained("FOLDER")
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": len(words)}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=None)).save_pretrained("FOLDER")
"""


def in_sorted_order(code, ours_last=False):
    """The code with its imports as isort and ruff leave them; behind all others where ours is first-party."""
    lines = code.splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    imports.sort(key=lambda line: (ours_last and "kvcache_dpex" in line, line.split()[1].lower()))
    return "\n".join([*imports, *(line for line in lines if line not in imports)])


@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_example_prints_what_is_shown(code, printed):
    if "import torch" in code:
        pytest.importorskip("torch", reason="torch is not installed")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, str(README), "exec"), {})
    assert output.getvalue() == printed


@pytest.mark.parametrize("ours_last", [False, True])
@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_examples_work_in_the_order_that_formatters_leave(code, printed, ours_last):
    if "import torch" in code:
        pytest.importorskip("torch", reason="torch is not installed")
    assert output_of(in_sorted_order(code, ours_last)) == printed.strip()


def test_generation(tmp_path):
    pytest.importorskip("transformers", minversion="5.24", reason="transformers is not installed")
    (code,) = GENERATION
    assert in_sorted_order(code).split() == code.split()
    code, count = re.subn(r'^name = ".*"', f"name = {str(tmp_path)!r}", code, flags=re.MULTILINE)
    assert count == 1
    printed = output_of(MODEL.replace("FOLDER", str(tmp_path)) + code, TQDM_DISABLE="1")
    assert printed.splitlines()[0].startswith("Keys and values are kept in ")
    assert "int8_per_token_head, read in place" in printed


def test_there_are_examples():
    assert len(EXAMPLES) >= 3

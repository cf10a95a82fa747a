"""The tokenizers of published GGUF files, compared with the token ids from their models' own tokenizers.

    python benchmarks/peers/gguf_vocabularies.py FOLDER

FOLDER is the folder `models` of llama.cpp's sources (the source package of llama-cpp-python has them under
vendor/llama.cpp). It has the headers of published models (`ggml-vocab-*.gguf`), texts (`.inp`) and the ids that
transformers gave for these texts (`.out`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from quire.errors import QuireError
from quire.frontend.tokenizer import Tokenizer
from quire.gguf.file import open_gguf

BETWEEN_TEXTS = "\n__ggml_vocab_test__\n"


def main() -> None:
    print("| vocabulary | kind, pre-tokenizer | tokens | texts with the same ids | texts decoded back |")
    print("|---|---|---|---|---|")
    for path in sorted(Path(sys.argv[1]).glob("ggml-vocab-*.gguf.out")):
        file = path.with_suffix("")
        metadata = open_gguf(file).metadata
        kinds = [str(metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre")]
        cells = [file.stem.removeprefix("ggml-vocab-"), ", ".join(kinds), f"{len(metadata['tokenizer.ggml.tokens']):,}"]
        try:
            tokenizer = Tokenizer.from_folder(file)
        except QuireError as error:
            print("|", " | ".join([*cells, error.message.partition(". ")[0], ""]), "|")
            continue
        texts = file.with_suffix(".gguf.inp").read_text().removesuffix(BETWEEN_TEXTS).split(BETWEEN_TEXTS)
        expected = [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
        found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        same = sum(ids == wanted for ids, wanted in zip(found, expected, strict=True))
        decoded = [tokenizer.decode(ids, skip_special_tokens=False) for ids in found]
        back = sum(text == original for text, original in zip(decoded, texts, strict=True))
        print("|", " | ".join([*cells, f"{same} of {len(texts)}", f"{back} of {len(texts)}"]), "|")


if __name__ == "__main__":
    main()

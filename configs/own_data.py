"""The model of `nag_small.py` on texts of your own.

Arguments: `source` (text, jsonl, parquet or huggingface), `tokenizer` (bytes, bpe, tokenizers_json,
sentencepiece or tiktoken), `smoke` (seconds). Files are named on the command line:

  --config=configs/own_data.py:source=jsonl --config.data.source.paths='a/*.jsonl.gz,b.jsonl'
"""

from ml_collections import ConfigDict

from nag_jax.config import parse_arg, smoke


def get_config(arg: str = "") -> ConfigDict:
    """Returns what differs from the defaults."""
    args = parse_arg(arg, source="text", tokenizer="bpe")
    config = ConfigDict(
        {
            "data": {"source": {"kind": args.source}, "tokenizer": {"kind": args.tokenizer}},
        }
    )
    return smoke(config) if args.smoke else config

"""Continues a prompt with a trained model, streaming to the terminal.

  python -m nag_jax.generate --checkpoint=runs/nag --prompt='def main():'

The text goes to standard output; why it ended, to standard error.
"""

import sys

from absl import flags

from nag_jax import cli

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "a run's folder or one step's folder")
_STEP = flags.DEFINE_integer("step", None, "which step; the newest intact one by default")
_PROMPT = flags.DEFINE_string("prompt", "", "text to continue")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "at most so many new tokens")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0 takes the most likely token each time")
_TOP_K = flags.DEFINE_integer("top_k", 0, "draw among the k most likely tokens; 0 for all")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "draw among the tokens that reach this probability")
_SEED = flags.DEFINE_integer("seed", 0, "seed of the draws")
_USER_KINDS = flags.DEFINE_bool(
    "allow_user_kinds", False, "import classes that the checkpoint's config names"
)
flags.mark_flag_as_required("checkpoint")

REASONS = {
    "document": "the model began a new document",
    "context": "the context is full",
    "max_tokens": "--max_tokens reached",
}


def main(config, flag_values) -> int:
    """Loads the run, echoes the prompt and streams the continuation."""
    del config
    from nag_jax.evals.generate import check_settings, encode_prompt
    from nag_jax.runs import load_run

    names = ("max_tokens", "temperature", "top_k", "top_p", "seed")
    settings = {name: flag_values[name].value for name in names}
    check_settings(**settings)
    run = load_run(
        flag_values.checkpoint, flag_values.step, allow_user_kinds=flag_values.allow_user_kinds
    )

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    # A prompt that cannot be continued is refused before it is shown.
    encode_prompt(run.tokenizer, flag_values.prompt, run.config.data.row_length)
    show(flag_values.prompt)
    result = run.generate(flag_values.prompt, **settings, on_text=show)
    show("\n")
    print(
        f"[step {run.step}, corpus {run.corpus_fingerprint}: {REASONS[result.stop]}]",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    cli.run(main, takes_config=False)

"""Continues prompts with a trained model, streaming to the terminal.

  python -m nag_jax.generate --checkpoint=runs/nag --prompt='def main():'
  python -m nag_jax.generate --checkpoint=runs/nag --prompt='import ' --prompt='class '

The text goes to standard output; why it ended, to standard error. Several prompts run together and
are shown one after the other when all have ended.
"""

import sys

from absl import flags

from nag_jax import cli

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "a run's folder or one step's folder")
_STEP = flags.DEFINE_integer("step", None, "which step; the newest intact one by default")
_PROMPT = flags.DEFINE_multi_string("prompt", [""], "text to continue; may be given several times")
_LOOPS = flags.DEFINE_integer("loops", None, "runs of the model's loop; as in training by default")
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
        flag_values.checkpoint,
        flag_values.step,
        loops=flag_values.loops,
        allow_user_kinds=flag_values.allow_user_kinds,
    )
    prompts = flag_values.prompt

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def stream(_: int, text: str) -> None:
        show(text)

    # A prompt that cannot be continued is refused before it is shown.
    for prompt in prompts:
        encode_prompt(run.tokenizer, prompt, run.config.data.row_length)
    streams = len(prompts) == 1
    if streams:
        show(prompts[0])
    results = run.generate_batch(prompts, **settings, on_text=stream if streams else None)
    for prompt, result in zip(prompts, results, strict=True):
        show("\n" if streams else f"{prompt}{result.text}\n")
        print(
            f"[step {run.step}, corpus {run.corpus_fingerprint}: {REASONS[result.stop]}]",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    cli.run(main, config="refused")

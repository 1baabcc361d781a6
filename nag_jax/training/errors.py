"""How a run ends when it cannot go on although the user made no mistake in the config."""


class RunFailed(Exception):
    """The run stopped on its own; one sentence says why and where it can be taken up again."""

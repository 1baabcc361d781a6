"""The one exception that means "the user made a mistake we can name"."""


class UserError(Exception):
    """A mistake in a flag, config, file or checkpoint, told in one clear sentence.

    The sentence names the key, file or value and what is allowed. The binaries print it without a
    traceback and exit with code 2.
    """

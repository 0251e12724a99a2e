"""A set-up hook of the user's own."""

import os


def hook():
    """Leave a trace that an actor can see."""
    os.environ["USERS_HOOK_RAN"] = "yes"

# None of it is checked: to bind its 400 models took pyright longer than all else that it binds.
from typing import Any

def __getattr__(name: str) -> Any: ...

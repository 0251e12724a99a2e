"""A stand-in for nvtx: it writes down what is opened and closed."""

import types


class FakeNvtx(types.ModuleType):
    """Keeps what was opened and closed; a recording stand-in."""

    def __init__(self):
        super().__init__("nvtx")
        self.calls = []

    def start_range(self, message=None, color=None, domain=None, category=None, payload=None):
        self.calls.append(("start", message, domain, category, payload))
        return len(self.calls)

    def end_range(self, identifier):
        self.calls.append(("end", identifier))

    def push_range(self, message=None, color=None, domain=None, category=None, payload=None):
        self.calls.append(("push", message, domain, category, payload))

    def pop_range(self, domain=None):
        self.calls.append(("pop", domain))

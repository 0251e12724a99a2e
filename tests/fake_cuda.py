"""A fake `torch.cuda` with one stream, whose device runs behind the host: it has no way to wait.

Work is put into the stream with its length in ms; `advance` lets the device's time pass.  Every use is in
`calls`, so that a test sees that nothing else was asked.
"""


class FakeCuda:
    """In the place of `torch.cuda`."""

    def __init__(self, *, initialized=True):
        self.initialized = initialized
        self.capturing = False
        self.calls = []
        self.created = 0
        self.free_ms = 0.0
        self.now_ms = 0.0

    def work(self, length_ms):
        """Put a kernel into the stream; it runs after those before it."""
        self.free_ms = max(self.free_ms, self.now_ms) + length_ms

    def advance(self, length_ms):
        """Let the device's time pass."""
        self.now_ms += length_ms

    def is_initialized(self):
        return self.initialized

    def is_current_stream_capturing(self):
        return self.capturing

    def current_device(self):
        return 0

    def Event(self, *, enable_timing):
        assert enable_timing
        self.created += 1
        return _Event(self)

    def __getattr__(self, name):
        raise AssertionError(f"torch.cuda.{name} was asked for")


class _Event:
    def __init__(self, cuda):
        self._cuda = cuda
        self._at_ms = None

    def record(self):
        self._cuda.calls.append("record")
        self._at_ms = max(self._cuda.free_ms, self._cuda.now_ms)

    def query(self):
        self._cuda.calls.append("query")
        return self._at_ms <= self._cuda.now_ms

    def elapsed_time(self, end):
        assert all([self.query(), end.query()]), "this would wait, or raise"
        return end._at_ms - self._at_ms

    def __getattr__(self, name):
        raise AssertionError(f"Event.{name} was asked for")

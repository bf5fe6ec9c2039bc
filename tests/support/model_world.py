"""Stand-ins for models that a server loads on demand, with counted memory."""

import threading
import time
import weakref
from types import SimpleNamespace

from mlx_mtp.machine.stream import pass_turn
from mlx_mtp.serve.catalog import ModelFacts
from mlx_mtp.serve.limits import JobLimits
from mlx_mtp.serve.models import Models
from mlx_mtp.serve.slot import Ready

SIZE = 4 << 20  # bytes that each model counts


class Loaded(SimpleNamespace):
    """A loaded model, to which weak references can be made."""


class World:
    """Models that count SIZE bytes each while anything refers to them, with jobs of one step per prompt token."""

    def __init__(self, monkeypatch):
        self.order, self.hold, self.loads, self.most = [], threading.Event(), [], 0
        self.gates, self.fails = {}, {}
        self.hold.set()
        monkeypatch.setattr("mlx_mtp.serve.engine.answer", self.answer)
        self.bytes, self.made = 0, []
        counted = SimpleNamespace(get_active_memory=lambda: self.bytes, clear_cache=lambda: None)
        monkeypatch.setattr("mlx_mtp.serve.models.mx", counted)
        self.free, self.measured = 1 << 60, 0
        monkeypatch.setattr("mlx_mtp.serve.models.memory", SimpleNamespace(available=self.available))

    def answer(self, served, job, crowded):
        while not self.hold.is_set():
            yield
        for _ in job.request.prompt:
            self.order.append(served.name)
            yield
        job.send(served.name)

    def available(self):
        self.measured += 1
        return SimpleNamespace(bytes=self.free)

    def load(self, offer):
        self.loads.append(offer.name)
        while (gate := self.gates.get(offer.name)) and not gate.is_set():
            pass_turn()  # as a load does after each piece of weights
            time.sleep(0.001)
        tree = SimpleNamespace(decoded=False, nbytes=0)
        served = Loaded(name=offer.name, tree=tree, ranks=None, batch=None, files=None)
        self.grow(SIZE)
        weakref.finalize(served, self.grow, -SIZE)
        self.most = max(self.most, self.bytes)
        if error := self.fails.pop(offer.name, None):
            served.itself = served  # as parts of a model refer to each other
            raise error
        return Ready(served, SimpleNamespace(name=offer.name))

    def grow(self, size):
        self.bytes += size

    def models(self, names="abc", fit=2, find=None, **limits):
        """Return running models of which `fit` fit at once."""
        offers = [ModelFacts(name, needed=SIZE, size=SIZE) for name in names]
        most = fit * SIZE + SIZE // 2
        made = Models(find or (lambda: offers), self.load, JobLimits(**limits), most=most)
        self.made.append(made)
        made.thread.start()
        while made.state == "loading":
            time.sleep(0.001)
        return made

    def close(self):
        self.hold.set()
        for gate in self.gates.values():
            gate.set()
        for models in self.made:
            models.stop(0)
            models.thread.join(5)
            assert not models.thread.is_alive()

"""The agents of nodes as a controller sees them, without Ray: a call is made in this process."""

import time

from cluster.errors import FleetError
from orchestrator.core.controller.nodes import Node
from orchestrator.runtime.agents.agents import Agents


class Method:
    """A method of an actor."""

    def __init__(self, method):
        self.remote = method


class Actor:
    def __init__(self, files):
        self._files = files

    def __getattr__(self, name):
        return Method(getattr(self._files, name))


class RecordedAgents(Agents):
    """`nodes`: by name, the facts of each node, and what answers calls of its agent."""

    def __init__(self, nodes):
        super().__init__(lambda message: None)
        self.problem = ""
        self.files = {name: files for name, (_, files) in nodes.items()}
        self.nodes = {name: Node(name, f"ray-{name}", time.monotonic(), facts) for name, (facts, _) in nodes.items()}

    def actor(self, node):
        if node not in self.files:
            raise FleetError(f"node {node} is away")
        return Actor(self.files[node])

    def lose(self, *nodes):
        for node in nodes:
            del self.nodes[node], self.files[node]

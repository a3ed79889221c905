"""One step of the controller: the handler of every message, planning and launches."""

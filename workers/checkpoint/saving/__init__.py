"""Save a training's state: at once or in the background, on one rank or many, into a folder or an object store."""

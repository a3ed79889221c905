"""A package, so that fixtures of its scope end with it: no fleet idles beside the tests that come after."""

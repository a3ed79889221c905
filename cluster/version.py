"""The one place that knows our version: client, server and agents compare it when they meet."""

VERSION = "0.1.0"

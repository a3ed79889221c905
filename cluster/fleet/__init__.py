"""Definition of a fleet: the fields of its file, and the identity, certificates and record of one that is up."""

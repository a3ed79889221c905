"""Execution libraries that torch computes with: their switches, and checks that a switch took effect."""

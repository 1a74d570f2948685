"""Compiling for devices that are not there: topologies, collectives, advice."""

"""Ember: an anchor-free detector for CPUs and edge devices, with its backbone, neck and assigner."""

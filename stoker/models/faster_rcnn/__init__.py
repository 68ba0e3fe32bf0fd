"""Faster R-CNN: region proposal network and RoI heads."""

"""SSD300 and SSDlite, with their backbones and loss."""

"""What could stop or slow a training, found before it starts: `stoker check`, and its short form in `stoker train`."""

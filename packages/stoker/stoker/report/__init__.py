"""What a training and the commands about data and models show: on a terminal, as pages, and in TensorBoard."""

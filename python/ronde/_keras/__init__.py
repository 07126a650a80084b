"""What ronde.keras and ronde.tensorflow.keras share: one frontend, made for whichever Keras module is in use."""

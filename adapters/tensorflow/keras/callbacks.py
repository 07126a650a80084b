"""Callbacks for model.fit. See ronde._keras.callbacks."""

from ronde.tensorflow.keras import _frontend

BroadcastGlobalVariablesCallback = _frontend.callbacks.BroadcastGlobalVariablesCallback
MetricAverageCallback = _frontend.callbacks.MetricAverageCallback
LearningRateScheduleCallback = _frontend.callbacks.LearningRateScheduleCallback
LearningRateWarmupCallback = _frontend.callbacks.LearningRateWarmupCallback
BestModelCheckpoint = _frontend.callbacks.BestModelCheckpoint

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

"""OpenVINO's `ContinuousBatchingPipeline` as a comparator. It is no backend: it does not say which tokens it keeps."""

"""OpenVINO's native eviction and sparse attention beside kvtape's policies, and which options compute what they say."""

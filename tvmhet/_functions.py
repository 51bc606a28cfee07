"""Names of functions in compiled stages, for those who write them (`emit`) and those who call them (`runtime`)."""

STORAGES, STEADY = "storages", "steady"  # emit/kept_storages.py
TENSOR_AT = "tvmhet.TensorAt"  # passes/tensor_at.cc, called by what emit/share_storages.py makes

"""Names of functions in compiled stages, for those who write them (`emit`) and those who call them (`runtime`)."""

STORAGES, STEADY = "storages", "steady"  # emit/kept_storages.py

"""Which devices to rent, how many of each, and what runs where: a service or a job on a market of instances."""

from tvmhet.recommending.flow import recommend, study_of
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.measurements import read_measurements
from tvmhet.recommending.option import Option
from tvmhet.recommending.recommendation import Recommendation
from tvmhet.recommending.service import what_to_measure

__all__ = ["Goal", "Job", "Option", "Recommendation", "read_measurements", "recommend", "study_of", "what_to_measure"]

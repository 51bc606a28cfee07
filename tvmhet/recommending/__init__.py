"""Which devices to rent, how many of each, and what runs where: a service or a job on a market of instances."""

from tvmhet.recommending.flow import recommend
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.option import Option
from tvmhet.recommending.recommendation import Recommendation

__all__ = ["Goal", "Job", "Option", "Recommendation", "recommend"]

"""Anyrun's scheduler: against a slow model, against a world of nodes, and each promise by itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.environments.anyrun.scheduler import Config, Ended, Ready, Refused, Scheduler, Start, Stop
from rl.environments.anyrun.shapes import Quota, Resources, Shape
from tests.anyrun_model import Model, check, fuzz

NODE = Resources(cpu=4000, memory=8192, disk=10_000, pids=1000)
SMALL = Shape("image", Resources(100, 256, 100, 10))
PEAKED = Shape("image", Resources(100, 1024, 100, 10), Resources(1000, 4096, 500, 100))


def scheduler(nodes=1, capacity=NODE, quota=None, **config):
    s = Scheduler(Config(**{"silence_s": 1e9, **config}))
    for i in range(nodes):
        s.add_node(f"n{i}", capacity, 0.0)
    if quota:
        s.set_quota("t", quota)
    return s


def taken(s, kind):
    return [decision for decision in s.take() if isinstance(decision, kind)]


def running(s, shape=SMALL, keys=1, now=0.0, lease_s=100.0, first=0):
    """Creates and starts; [(env, Ready)]."""
    envs = [s.create("t", f"k{first + i}", shape, lease_s, now) for i in range(keys)]
    for start in taken(s, Start):
        s.started(start.placement, now)
    ready = {decision.env: decision for decision in taken(s, Ready)}
    return [(env, ready[env]) for env in envs]


SHAPES = [
    Shape("a", Resources(500, 1000, 1000, 50), Resources(1500, 2000, 1500, 80)),
    Shape("b", Resources(200, 3000, 500, 10)),
    Shape("a", Resources(2000, 500, 4000, 300), Resources(2000, 600, 4000, 300)),
]
OPS = st.tuples(st.sampled_from("cccccsssfxxddrrlnttt"), st.integers(0, 40), st.integers(0, 2), st.floats(0.01, 3.0))


@given(st.lists(OPS, max_size=60), st.integers(1, 3), st.integers(2, 12))
@settings(max_examples=120)
def test_decides_as_the_slow_model(ops, num_nodes, most):
    config = Config(creates_per_s=2.0, burst=3, queue_s=20.0, start_s=5.0, stop_s=2.0, silence_s=1e9, gap_s=1e9, attempts=2)
    quota = Quota(environments=most, creates_per_s=4.0, burst=5)
    fast, slow = scheduler(quota=quota, nodes=0, **{**vars(config)}), Model(config, quota)
    key_of, envs, starts = {}, {}, []
    now, nodes = 0.0, 0

    def join():
        nonlocal nodes
        fast.add_node(f"n{nodes}", NODE, now)
        slow.join(f"n{nodes}", NODE, fast.nodes.number[f"n{nodes}"])
        nodes += 1

    for _ in range(num_nodes):
        join()
    for kind, which, shape, wait in ops:
        now += wait
        placement = starts[which % len(starts)] if starts else 0
        present = sorted(slow.nodes)
        if kind == "c":
            slow.create(len(envs), SHAPES[shape], 8.0, now)
            env = fast.create("t", str(len(envs)), SHAPES[shape], 8.0, now)
            key_of[env] = len(envs)
            envs[len(envs)] = env
        elif kind == "s":
            fast.started(placement, now), slow.started(placement, now)
        elif kind == "x":
            fast.stopped(placement, now), slow.stopped(placement, now)
        elif kind == "f":
            fast.failed(placement, "broken", now), slow.failed(placement, now)
        elif kind == "d" and envs:
            fast.destroy(envs[which % len(envs)], now), slow.destroy(which % len(envs), now)
        elif kind == "r" and present:
            name, live = present[which % len(present)], Resources(100 * which, 150 * which, 200 * which, 20 * which)
            fast.report(name, now, live), slow.report(name, now, live)
        elif kind == "l" and present:
            fast.lose(present[which % len(present)], now), slow.lose(present[which % len(present)], now)
        elif kind == "n" and len(present) < 4:
            join()
        elif kind == "t":
            order = [fast.shapes[number] for number in fast.tenants[1].queues]
            fast.tick(now), slow.tick(now, order)
        log, slow.log = slow.log, []
        seen = []
        for decision in fast.take():
            match decision:
                case Start(placement, env, node):
                    starts.append(placement)
                    seen.append(("start", key_of.get(env, len(envs) - 1), node))
                case Stop(placement, node):
                    seen.append(("stop", placement, node))
                case Ready(env, _, node):
                    seen.append(("ready", key_of[env], node))
                case Ended(env, reason):
                    seen.append(("ended", key_of[env], reason))
        assert sorted(seen, key=str) == sorted(log, key=str)
        check(fast)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_placed_twice_and_nothing_is_left(seed):
    world = fuzz(6000, seed)
    assert {"node lost", "destroyed", "lease expired", "drained", "died", "parent gone"} <= set(world.ended.values())


def test_a_request_asked_twice_is_one_environment():
    s = scheduler()
    env = s.create("t", "k", SMALL, 60.0, 0.0)
    assert s.create("t", "k", SMALL, 60.0, 1.0) == env
    assert len(taken(s, Start)) == 1
    assert s.create("u", "k", SMALL, 60.0, 1.0) != env  # another tenant's key is another request
    s.destroy(env, 2.0)
    assert s.create("t", "k", SMALL, 60.0, 3.0) == env  # a repetition that comes late makes nothing new
    assert s.state(env) == "ended: destroyed"


def test_destroy_is_idempotent_and_ids_do_not_come_back():
    s = scheduler()
    [(env, ready)] = running(s)
    s.destroy(env, 1.0)
    s.destroy(env, 1.0)
    assert s.take() == [Ended(env, "destroyed"), Stop(ready.placement, "n0")]
    s.stopped(ready.placement, 2.0)
    [(other, _)] = running(s, first=1, now=3.0)
    s.destroy(env, 4.0)
    assert s.take() == []
    assert s.state(other) == "running"
    s.destroy(12345, 4.0)
    s.stopped(999, 4.0)


def test_resources_are_held_until_the_node_confirms():
    s = scheduler(capacity=Resources(1000, 300, 1000, 100), pressure=(1, 1, 1, 1), stop_s=5.0)
    [(env, ready)] = running(s)
    s.destroy(env, 1.0)
    s.take()
    second = s.create("t", "second", SMALL, 60.0, 1.0)
    s.tick(2.0)
    assert s.state(second) == "queued"
    s.tick(7.0)
    assert taken(s, Stop) == [Stop(ready.placement, "n0")]  # repeated
    s.stopped(ready.placement, 7.5)
    s.tick(8.0)
    assert s.state(second) == "starting"


def test_peaks_limit_starts_and_steady_needs_limit_the_rest():
    s = scheduler(pressure=(1, 1, 1, 1))
    envs = [s.create("t", str(i), PEAKED, 60.0, 0.0) for i in range(6)]
    first = taken(s, Start)
    assert len(first) == 2  # of 4096 MiB each
    for start in first:
        s.started(start.placement, 1.0)
    s.report("n0", 1.0, Resources(200, 2048, 200, 20))
    s.tick(1.0)
    assert len(taken(s, Start)) == 1  # 2 * 1024 run, one more peak of 4096 fits
    assert [s.state(env) for env in envs].count("queued") == 3


def test_a_node_under_pressure_takes_nothing():
    for full in (Resources(cpu=3900), Resources(memory=7600), Resources(disk=9300), Resources(pids=901)):
        s = scheduler(nodes=2)
        s.report("n0", 0.0, full)
        running(s, keys=20)
        assert s.nodes.count_N[:2].tolist() == [0, 20]
        s.report("n0", 1.0, Resources())
        running(s, keys=1, first=50, now=1.0)
        assert s.nodes.count_N.sum() == 21


def test_placements_since_the_last_report_count_as_live():
    s = scheduler(pressure=(1, 0.6, 1, 1))
    s.report("n0", 0.0, Resources(memory=500))
    running(s, PEAKED, keys=1)
    env = s.create("t", "more", PEAKED, 60.0, 1.0)  # 1024 MiB of the first one do not show yet
    assert s.state(env) == "queued"
    s.report("n0", 2.0, Resources())
    s.tick(2.0)
    assert s.state(env) == "starting"


def test_fills_one_node_before_the_next():
    s = scheduler(nodes=3, burst=1000)
    running(s, keys=40)
    assert sorted(s.nodes.count_N[:3].tolist()) == [0, 11, 29]  # 29 * 256 MiB is 92 % of a node


def test_starts_per_node_are_limited():
    s = scheduler(creates_per_s=10.0, burst=3)
    for i in range(8):
        s.create("t", str(i), SMALL, 60.0, 0.0)
    assert len(taken(s, Start)) == 3
    s.tick(0.1)
    assert len(taken(s, Start)) == 1
    s.tick(0.35)
    assert len(taken(s, Start)) == 2
    s.tick(100.0)
    assert len(taken(s, Start)) == 2


def test_prefers_a_node_that_has_the_image():
    s = scheduler(nodes=3)
    s.report("n2", 0.0, Resources(), images=["image"])
    assert running(s)[0][1].node == "n2"
    s.create("t", "other", Shape("elsewhere", Resources(100, 100, 100, 10)), 60.0, 0.0)
    assert taken(s, Start)[0].node == "n2"  # no one has it, the fuller node is better


def test_forks_on_the_same_node_first():
    s = scheduler(nodes=2, burst=100)
    s.report("n1", 0.0, Resources(), images=["image"])
    [(env, ready)] = running(s)
    assert ready.node == "n1"
    running(s, keys=5, first=1)
    s.report("n1", 0.0, Resources(memory=1000))
    s.create("t", "fork", SMALL, 60.0, 0.0, parent=env)
    assert taken(s, Start)[0][2:] == ("n1", SMALL, ready.placement, "n1")
    s.report("n1", 0.0, Resources(memory=8000))
    s.create("t", "away", SMALL, 60.0, 0.0, parent=env)
    assert taken(s, Start)[0][2:] == ("n0", SMALL, ready.placement, "n1")
    s.destroy(env, 1.0)
    with pytest.raises(Refused, match="not running"):
        s.create("t", "late", SMALL, 60.0, 1.0, parent=env)


def test_warm_environments_are_given_at_once_and_made_again():
    s = scheduler()
    s.set_pool(SMALL, 3)
    s.tick(0.0)
    for start in taken(s, Start):
        s.started(start.placement, 0.1)
    env = s.create("t", "k", SMALL, 5.0, 1.0)
    [ready] = s.take()
    assert (type(ready), ready.env) == (Ready, env)
    s.tick(1.1)
    assert len(taken(s, Start)) == 1
    s.tick(6.0)
    assert taken(s, Ended) == [Ended(env, "lease expired")]
    s.set_pool(SMALL, 1)
    s.tick(7.0)
    assert len(taken(s, Stop)) == 2  # the third is still starting
    check(s)


def test_quotas_make_a_tenant_wait_and_no_other():
    s = scheduler(quota=Quota(environments=2, queue=3), nodes=2)
    for i in range(5):
        s.create("t", str(i), SMALL, 60.0, 0.0)
    with pytest.raises(Refused, match="3 requests waiting"):
        s.create("t", "more", SMALL, 60.0, 0.0)
    assert len(taken(s, Start)) == 2
    s.set_quota("u", Quota(resources=Resources(10_000, 600, 10_000, 1000)))
    for i in range(4):
        s.create("u", str(i), SMALL, 60.0, 0.0)
    assert len(taken(s, Start)) == 2  # 600 MiB is two of 256
    s.set_quota("t", Quota())
    s.tick(1.0)
    assert len(taken(s, Start)) == 3


def test_tenants_take_turns():
    s = scheduler(nodes=0, burst=1000)
    for tenant in "ab":
        for i in range(10):
            s.create(tenant, str(i), SMALL, 60.0, 0.0)
    s.add_node("n", Resources(100_000, 256 * 11, 10**6, 10**6), 1.0)
    s.tick(1.0)
    assert len(taken(s, Start)) == 10
    assert [who.count for who in s.tenants[1:]] == [5, 5]


def test_a_request_that_fits_nowhere_blocks_no_other():
    s = scheduler()
    with pytest.raises(Refused, match="no node could ever hold"):
        s.create("t", "huge", Shape("image", Resources(memory=100_000)), 60.0, 0.0)
    running(s, Shape("image", Resources(memory=4000)))
    waits = s.create("t", "large", Shape("image", Resources(memory=5000)), 60.0, 0.0)
    s.create("t", "small", SMALL, 60.0, 0.0)
    assert s.state(waits) == "queued"
    assert len(taken(s, Start)) == 1
    s.tick(1000.0)
    assert Ended(waits, "queue timeout") in s.take()


def test_leases_end_unless_renewed_and_have_a_last_day():
    s = scheduler(lifetime_s=30.0, gap_s=1e9)
    [(env, ready)] = running(s, lease_s=10.0)
    assert s.renew(env, 10.0, 9.0)
    s.tick(15.0)
    assert s.state(env) == "running"
    for now in (18.0, 27.0):
        s.renew(env, 10.0, now)
    s.tick(30.0)
    assert s.take() == [Ended(env, "lease expired"), Stop(ready.placement, "n0")]
    assert not s.renew(env, 10.0, 31.0)


def test_a_lost_node_ends_what_ran_and_starts_again_what_did_not():
    s = scheduler(nodes=2, silence_s=10.0)
    [(env, ready)] = running(s)
    begun = s.create("t", "begun", SMALL, 60.0, 1.0)
    [start] = taken(s, Start)
    assert start.node == ready.node
    other = "n1" if ready.node == "n0" else "n0"
    s.report(other, 9.0, Resources())
    s.tick(9.0)
    s.tick(11.0)
    ended, again = s.take()
    assert ended == Ended(env, "node lost")
    assert (again.env, again.node) == (begun, other)
    s.started(start.placement, 12.0)  # the lost node's answer, late
    assert s.take() == []
    assert not s.report(ready.node, 13.0, Resources(), alive=[ready.placement, start.placement])
    assert s.take() == [Stop(ready.placement, ready.node), Stop(start.placement, ready.node)]
    check(s)


def test_a_node_that_restarts_has_lost_what_it_ran():
    s = scheduler()
    [(env, ready)] = running(s)
    s.add_node("n0", NODE, 1.0, alive=[ready.placement])
    assert s.take() == [Ended(env, "node lost"), Stop(ready.placement, "n0")]
    assert s.report("n0", 2.0, Resources())


def test_reports_are_reconciled_both_ways():
    s = scheduler()
    (env, ready), (other, _) = running(s, keys=2, now=5.0)
    s.report("n0", 6.0, Resources(), alive=[], asked=4.0)  # asked before they ran
    assert s.take() == []
    s.report("n0", 7.0, Resources(), alive=[ready.placement, 777], asked=6.5)
    assert s.take() == [Stop(777, "n0"), Ended(other, "died")]
    assert s.state(env) == "running"


def test_failing_starts_are_tried_elsewhere_and_then_given_up():
    s = scheduler(nodes=3, attempts=3)
    env = s.create("t", "k", SMALL, 60.0, 0.0)
    nodes = []
    for now in (0.1, 0.2, 0.3):
        [start] = taken(s, Start)
        nodes.append(start.node)
        s.failed(start.placement, "no image", now)
        s.tick(now)
    assert len(set(nodes)) == 3  # a node that failed rests
    assert s.state(env) == "ended: start failed: no image"
    check(s)


def test_a_start_that_does_not_answer_ends_and_is_stopped():
    s = scheduler(start_s=5.0)
    env = s.create("t", "k", SMALL, 60.0, 0.0)
    [start] = taken(s, Start)
    s.tick(6.0)
    assert s.take() == [Ended(env, "start timeout"), Stop(start.placement, "n0")]
    s.started(start.placement, 6.5)  # too late
    assert s.take() == []
    s.stopped(start.placement, 7.0)
    check(s)
    assert len(s.table) == 0


def test_draining_moves_no_one_and_takes_no_one():
    s = scheduler(nodes=2)
    (env, ready), (other, _) = running(s, keys=2)
    s.drain(ready.node, 1.0, grace_s=5.0)
    assert running(s, first=10, now=1.0)[0][1].node != ready.node
    s.destroy(other, 2.0)
    s.tick(3.0)
    assert s.state(env) == "running"
    s.take()
    s.tick(6.0)
    assert taken(s, Ended) == [Ended(env, "drained")]
    for placement in list(s.slot_of):
        s.stopped(placement, 6.5)
    s.tick(7.0)
    assert ready.node not in s.nodes.number


def test_a_clock_that_jumps_hurts_no_one():
    s = scheduler(silence_s=30.0)
    [(env, _)] = running(s, lease_s=20.0)
    s.tick(1.0)
    s.tick(5000.0)  # the machine slept: leases and reports were not possible
    assert s.state(env) == "running"
    assert "n0" in s.nodes.number
    s.report("n0", 4000.0, Resources())  # backwards
    s.tick(5009.0)
    assert s.state(env) == "running"
    s.tick(5018.5)
    s.tick(5024.0)
    assert s.state(env) == "ended: lease expired"


def test_keys_of_ended_environments_are_forgotten_in_the_end():
    s = scheduler(remember=10)
    envs = []
    for i in range(50):
        [(env, ready)] = running(s, first=i, now=float(i))
        s.destroy(env, float(i))
        s.stopped(ready.placement, float(i))
        envs.append(env)
    assert len(s.keys) == len(s.ended) == 10
    assert s.state(envs[0]) is None


@pytest.mark.parametrize("wrong", [dict(cpu=-1), dict(memory=1.5), dict(pids=True)])
def test_resources_are_whole_and_not_negative(wrong):
    with pytest.raises(ValueError, match="whole number >= 0"):
        Resources(**wrong)


def test_a_peak_is_no_less_than_the_steady_need():
    with pytest.raises(ValueError, match="peak must be at least steady"):
        Shape("image", Resources(cpu=5), Resources(cpu=4))


def test_nodes_that_come_and_go_take_no_room():
    s = scheduler(nodes=2)
    for i in range(100):
        running(s, first=i, now=float(i))
        s.lose("n1", float(i))
        s.add_node("n1", NODE, float(i))
    assert len(s.nodes) == 2
    check(s)


def test_shapes_that_come_and_go_take_no_room():
    s = scheduler(quota=Quota(environments=2, queue=1))
    [(stays, _)] = running(s, PEAKED, lease_s=1e9)
    for i in range(500):
        shape = Shape("image", Resources(i, 2, 2, 2))
        [(env, ready)] = running(s, shape, first=1 + i, now=float(i))
        waits = s.create("t", f"waits{i}", Shape("waits", Resources(i, 3, 3, 3)), 100.0, float(i))
        with pytest.raises(Refused, match="waiting"):
            s.create("t", f"refused{i}", Shape("refused", Resources(i, 4, 4, 4)), 100.0, float(i))
        assert s.shapes[s.table.shape[s.table.slot(env)]] == shape
        s.destroy(waits, float(i))
        s.destroy(env, float(i))
        s.stopped(ready.placement, float(i))
    assert len(s.shapes) <= 32
    assert s.shapes[s.table.shape[s.table.slot(stays)]] == PEAKED
    check(s)

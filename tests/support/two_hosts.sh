#!/bin/sh
# Two hosts in two network namespaces joined by a cable, each running the given command with --node-rank N appended.
# To be started in a network namespace of its own: unshare [--user --map-root-user] --net sh two_hosts.sh COMMAND...
# Host 0 has the address 10.77.0.1. WITH is what follows --node-rank N: the script and its arguments. RATE, if given, is
# the cable's speed in each direction, 1gbit say.
set -e
unshare --net sleep 600 &
other=$!
trap 'kill $other' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
ip link add cable type veth peer name cable netns $other
ip addr add 10.77.0.1/24 dev cable
ip link set cable up
ip link set lo up
nsenter --target $other --net sh -c "ip addr add 10.77.0.2/24 dev cable && ip link set cable up && ip link set lo up"
if [ -n "$RATE" ]; then
    tc qdisc add dev cable root tbf rate "$RATE" burst 1mb latency 50ms
    nsenter --target $other --net tc qdisc add dev cable root tbf rate "$RATE" burst 1mb latency 50ms
fi
nsenter --target $other --net "$@" --node-rank 1 $WITH &
far=$!
"$@" --node-rank 0 $WITH
wait $far

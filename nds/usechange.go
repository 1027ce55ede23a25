package nds

import (
	"bytes"
	"errors"
	"fmt"
	"time"
)

// useChange puts a change to use and returns what has to be saved. value is its NameTable in wire
// form.
func (c *Client) useChange(value []byte, r response) (saving, error) {
	if c.cfg.Hosts == nil {
		return saving{}, errors.New("a change of the table, which this agent has not asked for (NAMETAP_MERGE)")
	}
	parsed, err := parseChange(value)
	if err != nil {
		return saving{}, err
	}
	before := c.hosts
	if before == nil { // the table in use has no checksums
		before = &hostTable{}
	}
	next, changed, err := before.with(&parsed, c.cfg.Hosts.ShardOf)
	if err != nil {
		c.noteDifference(err)
		return saving{}, err
	}
	first, result := c.hosts == nil, resultUnchanged
	if !first && before.turn < len(before.shards) {
		c.checkInUse(before.turn)
	}
	if c.damaged {
		changed = next.all()
	}
	if first || len(changed) > 0 {
		result = resultApplied
		if err := c.applyShards(changed, first || c.damaged); err != nil {
			return saving{}, err
		}
		if next.len() == 0 && c.hasHosts() {
			c.warnEmpty(r)
		}
	}
	node := fingerprint(c.sentNode)
	save := saving{all: first || node != c.hostsNode}
	if !save.all && (len(changed) > 0 || !bytes.Equal(before.revision, next.revision)) {
		save.change = value
	}
	c.inUse, c.hosts, c.hostsNode, c.loaded = nil, next, node, true
	c.pushed(r, result)
	return save, nil
}

// noteDifference notes that a change was not used, if the reason is a checksum. The next stream then asks for
// what is missing.
func (c *Client) noteDifference(reason error) {
	if !differs(reason) {
		return
	}
	if c.hosts != nil {
		c.hosts, _ = c.hosts.checked()
	}
	c.setDifference(reason.Error(), c.inUseTable().digest)
}

// applyShards replaces shards of the table in use, or all of it.
func (c *Client) applyShards(shards map[int][]byte, whole bool) error {
	start := time.Now()
	err := c.cfg.Hosts.ApplyShards(shards, whole)
	c.metrics.duration.Observe(time.Since(start).Seconds())
	c.damaged = c.damaged && err != nil
	return err
}

// checkInUse notes whether a shard of the table in use has changed in memory.
func (c *Client) checkInUse(shard int) {
	if c.damaged || !c.cfg.Hosts.Damaged(shard) {
		return
	}
	c.damaged = true
	damage := fmt.Sprintf("shard %d of the table in use has changed in memory", shard)
	c.setDifference(damage, c.inUseTable().digest)
	c.log.Warn("the table is built anew with the next change", "error", damage)
}

// recheck computes the checksums of the hosts in use anew, so that the control plane sends again what
// has changed in memory.
func (c *Client) recheck() {
	actual, damage := c.hosts.checked()
	c.hosts = actual
	if damage != "" {
		c.setDifference(damage, c.inUseTable().digest)
		c.log.Warn("hosts of the table are asked for again", "error", damage)
	}
	for shard := range c.hosts.shards {
		c.checkInUse(shard)
	}
}

package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/conntrack"
	"github.com/nametap/nametap/internal/family"
)

// Messages of nf_tables (linux/netfilter/nf_tables.h). The tools can neither delete a table nor return the
// generation of the rules, which is a number that the kernel increases with each change of nft rules.
const (
	nftGetGeneration  = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN
	nftGetTable       = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETTABLE
	nftDeleteTable    = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELTABLE
	nfBatchGeneration = 1 // NFNL_BATCH_GENID
)

// askNetfilter sends a request over a connection of its own, and calls visit with the attributes of each reply.
func askNetfilter(visit func(attributes []byte), request conntrack.Request) error {
	c, err := conntrack.Dial()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Exchange(visit, request)
}

// nftGeneration returns the generation of the nft rules.
func nftGeneration() (uint32, error) {
	var value []byte
	err := askNetfilter(func(b []byte) {
		value = append(value, conntrack.FindAttribute(b, unix.NFTA_GEN_ID)...)
	}, conntrack.Request{Type: nftGetGeneration, Flags: unix.NLM_F_ACK, Family: unix.AF_UNSPEC})
	switch {
	case err != nil:
		return 0, err
	case len(value) != 4:
		return 0, errors.New("the kernel returned no generation of nft rules")
	}
	return binary.BigEndian.Uint32(value), nil
}

// currentGeneration returns the generation of the nft rules, or 0 if the kernel has no nft or if this process may not
// read the generation. After any other error, known is false.
func currentGeneration() (generation uint32, known bool) {
	generation, err := nftGeneration()
	if isAny(err, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.EINVAL, unix.EPERM) {
		return 0, true
	}
	return generation, err == nil
}

// askNFTTable asks nft for a table of a family. It returns nil if the table exists. family is the kernel's number
// of the family.
func askNFTTable(family uint8, table string) error {
	return askNetfilter(func([]byte) {}, conntrack.Request{
		Type: nftGetTable, Flags: unix.NLM_F_ACK, Family: family, Attributes: tableName(table)})
}

// deleteNFTTables deletes tables with everything in them, all or none. If any nft rules have changed since
// the given generation, it deletes none, and the kernel's error is ERESTART.
func deleteNFTTables(f family.Family, generation uint32, tables ...string) error {
	c, err := conntrack.Dial()
	if err != nil {
		return err
	}
	defer c.Close()
	expect := nl.NewRtAttr(nfBatchGeneration, nl.BEUint32Attr(generation)).Serialize()
	batch := []conntrack.Request{{Type: unix.NFNL_MSG_BATCH_BEGIN, Resource: unix.NFNL_SUBSYS_NFTABLES, Attributes: expect}}
	for _, table := range tables {
		batch = append(batch, conntrack.Request{Type: nftDeleteTable, Flags: unix.NLM_F_ACK, Family: f.Number(), Attributes: tableName(table)})
	}
	batch = append(batch, conntrack.Request{Type: unix.NFNL_MSG_BATCH_END, Resource: unix.NFNL_SUBSYS_NFTABLES})
	if err := c.Batch(batch...); err != nil {
		return fmt.Errorf("deleting nft tables %q: %w", tables, err)
	}
	return nil
}

// tableName returns the name of a table as an attribute.
func tableName(name string) []byte {
	return nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(name)).Serialize()
}

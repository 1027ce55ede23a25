package iptables

import (
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/conntrack"
)

// nftGetTable is a message of nf_tables (linux/netfilter/nf_tables.h).
const nftGetTable = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETTABLE

// askNFTTable asks nft for a table of a family. It returns nil if the table exists. family is the kernel's number
// of the family.
func askNFTTable(family uint8, table string) error {
	c, err := conntrack.Dial()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Exchange(func([]byte) {}, conntrack.Request{Type: nftGetTable, Flags: unix.NLM_F_ACK, Family: family,
		Attributes: nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(table)).Serialize()})
}

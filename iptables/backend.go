package iptables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/conntrack"
	"github.com/nametap/nametap/internal/family"
)

// A side is what one backend has in the kernel. Reading a backend changes nothing in the kernel. Above all, it does
// not make the kernel create a table of legacy.
type side struct {
	backend Backend
	tools   map[family.Family]tools // the tools of the families that have some
	saved   map[family.Family]saved // the rules of the families that could be read
	reason  map[family.Family]error // why the other families could not be read
}

// inspect reads a backend.
func inspect(ctx context.Context, cfg Config, b Backend) *side {
	s := &side{backend: b, tools: make(map[family.Family]tools), saved: make(map[family.Family]saved), reason: make(map[family.Family]error)}
	for _, f := range family.All() {
		t, err := newToolbox(cfg).find(ctx, b, f)
		inKernel := saved(nil)
		if err == nil {
			s.tools[f] = t
			inKernel, err = t.read(ctx)
		}
		if err != nil {
			s.reason[f] = err
		} else {
			s.saved[f] = inKernel
		}
	}
	return s
}

// usable reports whether any family can be used.
func (s *side) usable() bool { return len(s.saved) > 0 }

// unclear reports whether the backend may be usable later: it could not be read, for a reason that may pass.
func (s *side) unclear() bool {
	return !s.usable() && (temporary(s.reason[family.IPv4]) || temporary(s.reason[family.IPv6]))
}

// place returns the place of a family's rules in this backend.
func (s *side) place(f family.Family) place { return place{family: f, tools: s.tools[f]} }

// hasOwn reports whether the backend has rules of nametap.
func (s *side) hasOwn() bool {
	for _, saved := range s.saved {
		if saved.hasOwn() {
			return true
		}
	}
	return false
}

// foreign counts the rules, chains and policies of other programs in the backend.
func (s *side) foreign() int {
	n := 0
	for _, saved := range s.saved {
		n += saved.foreign()
	}
	return n
}

// err returns why no family can be used.
func (s *side) err() error {
	return fmt.Errorf("iptables backend %s cannot be used: %w",
		s.backend, errors.Join(s.reason[family.IPv4], s.reason[family.IPv6]))
}

// knownEmpty reports whether, according to the kernel itself, backend b has nothing of nametap in family f, whose rules
// the tools could not read.
func knownEmpty(b Backend, f family.Family) bool {
	if b == Legacy {
		tables, err := legacyTables(f)
		return err == nil && len(tables) == 0
	}
	for _, table := range tableNames() {
		if !isAny(askNFTTable(f.Number(), table), unix.ENOENT, unix.EOPNOTSUPP, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT) {
			return false
		}
	}
	return true
}

// legacyTables returns which of the tables that nametap uses exist in legacy. If the kernel has not loaded
// ip_tables, no tables exist.
func legacyTables(f family.Family) ([]string, error) {
	name := "/proc/thread-self/net/ip_tables_names"
	if f == family.IPv6 {
		name = "/proc/thread-self/net/ip6_tables_names"
	}
	text, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading which tables iptables-legacy has: %w", err)
	}
	return slices.DeleteFunc(strings.Fields(string(text)), func(table string) bool { return !slices.Contains(tableNames(), table) }), nil
}

// nftGetTable is a message of nf_tables (linux/netfilter/nf_tables.h).
const nftGetTable = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETTABLE

// askNFTTable asks nft for a table of a family. It returns nil if the table exists. family is the kernel's number
// of the family.
func askNFTTable(family uint8, table string) error {
	return conntrack.Exchange(func([]byte) {}, conntrack.Request{Type: nftGetTable, Flags: unix.NLM_F_ACK, Family: family,
		Attributes: nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(table)).Serialize()})
}

// A machine has what both backends have in the kernel. plainBackend is the backend that the tool named
// iptables-restore uses.
type machine struct {
	nft, legacy  *side
	plainBackend Backend
}

// inspectAll reads both backends.
func inspectAll(ctx context.Context, cfg Config) machine {
	return machine{nft: inspect(ctx, cfg, NFT), legacy: inspect(ctx, cfg, Legacy), plainBackend: newToolbox(cfg).plainBackend(ctx)}
}

// side returns what one backend has.
func (m machine) side(b Backend) *side {
	if b == Legacy {
		return m.legacy
	}
	return m.nft
}

// choose returns the backend to use, and why. If the configuration does not name a backend, it chooses as the
// comment of [Auto] says. It prefers the backend of other programs, because a backend that no other program uses may
// be there by accident: this image may have a tool of the other kind.
func (m machine) choose(configured Backend) (*side, string, error) {
	nft, legacy := m.nft, m.legacy
	switch {
	case configured == NFT || configured == Legacy:
		if s := m.side(configured); s.usable() {
			return s, "as configured", nil
		}
		return nil, "", m.side(configured).err()
	case !nft.usable() && !legacy.usable():
		return nil, "", errors.Join(nft.err(), legacy.err())
	case nft.unclear(): // it may be usable soon, and it is better to wait than to use the wrong backend
		return nil, "", nft.err()
	case legacy.unclear():
		return nil, "", legacy.err()
	case !legacy.usable():
		return nft, "this process has no other backend", nil
	case !nft.usable():
		return legacy, "this process has no other backend", nil
	}
	n, l := nft.foreign(), legacy.foreign()
	switch {
	case nft.hasOwn() && !legacy.hasOwn():
		return nft, "it has rules of nametap", nil
	case legacy.hasOwn() && !nft.hasOwn():
		return legacy, "it has rules of nametap", nil
	case n > l:
		return nft, fmt.Sprintf("other programs have %d rules and chains in it, and %d in legacy", n, l), nil
	case l > n:
		return legacy, fmt.Sprintf("other programs have %d rules and chains in it, and %d in nft", l, n), nil
	}
	return m.side(m.plainBackend), "it is what iptables-restore uses", nil
}

// left reports whether rules enforce the policy of a guard, and whether there are rules of nametap and all of them have a lease.
func (m machine) left() (enforced, endsByItself bool) {
	found, leased := false, true
	for _, side := range []*side{m.nft, m.legacy} {
		for f, s := range side.saved {
			enforced = enforced || s.guardState() == GuardEnforces
			found, leased = found || s.hasOwn(), leased && (!s.hasOwn() || s.leased(f))
		}
	}
	return enforced, found && leased
}

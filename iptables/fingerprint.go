package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"os"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
)

// A fingerprint shows whether rules have changed in the kernel. If two fingerprints are equal, no rule has changed
// between them, except for changes of legacy's rules that were undone.
type fingerprint struct {
	generation uint32 // the generation of nft's rules
	legacy     uint64 // a hash of legacy's rules
}

// takeFingerprint takes a fingerprint, which costs far less than reading the rules.
func takeFingerprint(seed maphash.Seed) (fingerprint, error) {
	generation, err := nftGeneration()
	if err != nil && !isAny(err, unix.EOPNOTSUPP, unix.EINVAL, unix.EPROTONOSUPPORT) { // no nft
		return fingerprint{}, err
	}
	var hash maphash.Hash
	hash.SetSeed(seed)
	for _, f := range family.All() {
		if err := legacyPrint(&hash, f); err != nil {
			return fingerprint{}, err
		}
	}
	return fingerprint{generation, hash.Sum64()}, nil
}

// legacyPrint adds to a hash the tables of legacy that nametap uses, without their counters.
func legacyPrint(hash *maphash.Hash, f family.Family) error {
	tables, err := legacyTables(f)
	if errors.Is(err, os.ErrPermission) {
		return nil // iptables-legacy-save cannot read them either
	}
	if err != nil {
		return err
	}
	for _, table := range tables {
		info := make([]byte, infoSize)
		copy(info, table)
		if err := askLegacy(f, legacyInfo, info); err != nil {
			return fmt.Errorf("checking for legacy table %s of %s: %w", table, f, err)
		}
		size := binary.NativeEndian.Uint32(info[infoSize-4:])
		entries := make([]byte, entriesHeader+size)
		copy(entries, table)
		binary.NativeEndian.PutUint32(entries[tableNameSize:], size)
		if err := askLegacy(f, legacyEntries, entries); err != nil {
			return fmt.Errorf("reading legacy table %s of %s: %w", table, f, err)
		}
		_, _ = hash.Write(info)
		hashEntries(hash, f, entries[entriesHeader:])
	}
	return nil
}

// hashEntries adds the entries of a table to a hash, without their counters. An entry
// (struct ipt_entry, ip6t_entry) describes the packets that it matches by their
// addresses. It then has the offsets of its target and of the next entry, its counters,
// its further matches and its target.
func hashEntries(hash *maphash.Hash, f family.Family, entries []byte) {
	const counters = 16
	packet := 84 // struct ipt_ip
	if f == family.IPv6 {
		packet = 136 // struct ip6t_ip6
	}
	next := packet + 4 + 2 // after nfcache and target_offset
	begin := (next + 2 + 4 + 7) &^ 7
	for len(entries) >= begin+counters {
		size := int(binary.NativeEndian.Uint16(entries[next:]))
		if size < begin+counters || size > len(entries) {
			break
		}
		_, _ = hash.Write(entries[:begin])
		_, _ = hash.Write(entries[begin+counters : size])
		entries = entries[size:]
	}
	_, _ = hash.Write(entries)
}

package iptables

import (
	"context"
	"errors"
	"fmt"
)

// side is what was found out about one backend. Nothing that finds it out
// changes anything: above all, no table of legacy is made by looking.
type side struct {
	backend Backend
	tools   map[Family]tools // no entry: unusable says why
	saved   map[Family]saved // of those families that could be read
	reason  map[Family]error // why a family cannot be used
}

// usable says whether any family can be used.
func (s *side) usable() bool { return len(s.saved) > 0 }

// unclear says whether the backend may be usable although it could not be read: not
// for a reason that lasts.
func (s *side) unclear() bool {
	return !s.usable() && (mayPass(s.reason[IPv4]) || mayPass(s.reason[IPv6]))
}

// place returns the place of a family's rules in this backend.
func (s *side) place(f Family, attempts int) place {
	return place{backend: s.backend, family: f, tools: s.tools[f], attempts: attempts}
}

// ours says whether the backend holds anything of ours.
func (s *side) ours() bool {
	for _, saved := range s.saved {
		if saved.ours() {
			return true
		}
	}
	return false
}

// foreign counts what others have in the backend.
func (s *side) foreign() int {
	n := 0
	for _, saved := range s.saved {
		n += saved.foreign()
	}
	return n
}

// err says why no family can be used.
func (s *side) err() error {
	return fmt.Errorf("iptables backend %s cannot be used: %w",
		s.backend, errors.Join(s.reason[IPv4], s.reason[IPv6]))
}

// look finds out about a backend.
func look(ctx context.Context, b Backend) *side {
	s := &side{
		backend: b,
		tools:   make(map[Family]tools),
		saved:   make(map[Family]saved),
		reason:  make(map[Family]error),
	}
	for _, f := range families() {
		t, err := findTools(ctx, b, f)
		if err == nil {
			s.tools[f] = t
			s.saved[f], err = t.read(ctx)
		}
		if err != nil {
			delete(s.saved, f)
			s.reason[f] = err
		}
	}
	return s
}

// choose says which backend to use, and why: the one that was asked for; else
// the only one that can be used; else the one in which other programs have more
// rules, since one that nobody uses may be there by accident (a tool of the
// other kind in this image); else the one that holds our rules already; else
// what the plain iptables-restore uses.
func choose(asked Backend, nft, legacy *side, plain Backend) (*side, string, error) {
	switch {
	case asked == NFT || asked == Legacy:
		s := nft
		if asked == Legacy {
			s = legacy
		}
		if !s.usable() {
			return nil, "", s.err()
		}
		return s, "as configured", nil
	case !nft.usable() && !legacy.usable():
		return nil, "", errors.Join(nft.err(), legacy.err())
	case nft.unclear(): // rules in the wrong backend would be worse than none yet
		return nil, "", nft.err()
	case legacy.unclear():
		return nil, "", legacy.err()
	case !legacy.usable():
		return nft, "legacy cannot be used", nil
	case !nft.usable():
		return legacy, "nft cannot be used", nil
	}
	n, l := nft.foreign(), legacy.foreign()
	switch {
	case n > l:
		return nft, fmt.Sprintf("others have %d rules and chains in it, and %d in legacy", n, l), nil
	case l > n:
		return legacy, fmt.Sprintf("others have %d rules and chains in it, and %d in nft", l, n), nil
	case nft.ours() && !legacy.ours():
		return nft, "our rules are there", nil
	case legacy.ours() && !nft.ours():
		return legacy, "our rules are there", nil
	case plain == Legacy:
		return legacy, "it is what iptables-restore uses", nil
	default:
		return nft, "it is what iptables-restore uses", nil
	}
}

// plainBackend returns the backend of the tool without a backend in its name,
// NFT if there is none.
func plainBackend(ctx context.Context) Backend {
	path, err := lookPath("iptables-restore")
	if err != nil {
		return NFT
	}
	if b, err := backendOf(ctx, path); err == nil {
		return b
	}
	return NFT
}

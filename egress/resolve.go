package egress

import (
	"context"
	"net/netip"
	"slices"
)

// maxResolved is the number of endpoints whose names are resolved for one connection.
const maxResolved = 16

// A found is what a lookup came to: addresses to dial, or a refusal that says why there are none.
type found struct {
	addrs []netip.AddrPort
	err   error
}

// lookUp finds the addresses of targets, each family of a name at the same time. It sends n results,
// for which the channel has room; those that are cached before it returns. any allows all addresses.
func (s *Server) lookUp(ctx context.Context, targets []endpoint, any bool) (results <-chan found, n int) {
	families := s.families()
	all := make(chan found, len(families)*len(targets))
	names := 0
	for _, target := range targets {
		if target.name == "" {
			n++
			all <- s.allowed(target, []netip.Addr{target.addr}, any)
			continue
		}
		if names++; names > maxResolved {
			continue
		}
		for _, family := range families {
			n++
			if addrs, known, err := s.config.Resolve(ctx, target.name, family, true); known {
				all <- s.resolved(target, addrs, err, any)
				continue
			}
			go func() {
				addrs, _, err := s.config.Resolve(ctx, target.name, family, false)
				all <- s.resolved(target, addrs, err, any)
			}()
		}
	}
	return all, n
}

// resolved returns the result of a lookup.
func (s *Server) resolved(target endpoint, addrs []netip.Addr, err error, any bool) found {
	if err != nil {
		return found{err: refuse(ReasonResolution, "resolving %s: %w", target.name, err)}
	}
	return s.allowed(target, addrs, any)
}

// allowed returns the addresses of a target that may be dialled.
func (s *Server) allowed(target endpoint, addrs []netip.Addr, any bool) found {
	var f found
	for _, addr := range addrs {
		addr = addr.Unmap()
		err := s.forbids(addr, target.port)
		switch {
		case !slices.Contains(s.families(), familyOf(addr)):
			f.err = refuse(ReasonAddress, "%s is refused: there is no --egress-source of its family", addr)
		case err != nil && !any && target.name == "":
			f.err = refuse(ReasonAddress, "the endpoint %s is refused: %w", addr, err)
		case err != nil && !any:
			f.err = refuse(ReasonAddress, "%s has only addresses that are refused: %w", target.name, err)
		default:
			f.addrs = append(f.addrs, netip.AddrPortFrom(addr, target.port))
		}
	}
	if len(f.addrs) > 0 {
		f.err = nil
	}
	return f
}

// families returns the families that names are resolved for.
func (s *Server) families() []Family {
	if len(s.config.Sources) != 1 {
		return []Family{IPv6, IPv4}
	}
	return []Family{familyOf(s.config.Sources[0])}
}

// inTurn sorts addresses as they are dialled: the families in turn, IPv6 first (RFC 8305, section 4).
func inTurn(addrs []netip.AddrPort) []netip.AddrPort {
	var families [2][]netip.AddrPort
	for _, a := range addrs {
		at := 0
		if a.Addr().Is4() {
			at = 1
		}
		families[at] = append(families[at], a)
	}
	out := addrs[:0]
	for i := range max(len(families[0]), len(families[1])) {
		for _, family := range families {
			if i < len(family) {
				out = append(out, family[i])
			}
		}
	}
	return out
}

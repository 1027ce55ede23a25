package iptables

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) { wait.Main(m) }

// newSide returns what a backend has if iptables-save prints rules, or cannot read them (an error).
func newSide(t *testing.T, b Backend, rules any) *side {
	t.Helper()
	s := &side{backend: b, saved: map[family.Family]saved{}, reason: map[family.Family]error{}}
	for _, f := range family.All() {
		switch rules := rules.(type) {
		case error:
			s.reason[f] = rules
		case string:
			var err error
			if s.saved[f], err = parseSave([]byte(rules)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return s
}

// K4, K13: the backend with rules of nametap is used, then the one of other programs, then the one of
// iptables-restore. A backend that cannot be read for a moment, or hangs, does not count as unsupported.
func TestChoose(t *testing.T) {
	t.Parallel()
	const (
		own     = "*nat\n:OUTPUT ACCEPT [0:0]\n:NAMETAP_OUTPUT - [0:0]\n-A OUTPUT -j NAMETAP_OUTPUT\nCOMMIT\n"
		one     = "*filter\n-A FORWARD -j DROP\nCOMMIT\n"
		two     = "*filter\n:FORWARD DROP [0:0]\n:SITE - [0:0]\nCOMMIT\n"
		useless = "*filter\n:FORWARD ACCEPT [0:0]\nCOMMIT\n"
	)
	for _, test := range []struct {
		configured  Backend
		nft, legacy any
		plain       Backend
		want        Backend // "" for an error
		says        string
	}{
		{Auto, two, own, NFT, Legacy, "it has rules of nametap"},
		{Auto, "", "", NFT, NFT, "it is what iptables-restore uses"},
		{Auto, useless, "", Legacy, Legacy, "it is what iptables-restore uses"},
		{Auto, own, own, Legacy, Legacy, "it is what iptables-restore uses"},
		{Auto, "", own, NFT, Legacy, "it has rules of nametap"},
		{Auto, own, "", Legacy, NFT, "it has rules of nametap"},
		{Auto, own, one, Legacy, NFT, "it has rules of nametap"},
		{Auto, useless, one, NFT, Legacy, "other programs have 2 rules and chains in it, and 0 in nft"},
		{Auto, two, one, Legacy, NFT, "other programs have 4 rules and chains in it, and 2 in legacy"},
		{Auto, "", errMissing, Legacy, NFT, "this process has no other backend"},
		{Auto, errMissing, "", NFT, Legacy, "this process has no other backend"},
		{Auto, errors.New("a failure"), own, NFT, "", "backend nft"},
		{Auto, own, context.DeadlineExceeded, NFT, "", "backend legacy"},
		{Auto, errMissing, errRefused, NFT, "", "backend legacy"},
		{NFT, "", two, Legacy, NFT, "as configured"},
		{Legacy, own, "", NFT, Legacy, "as configured"},
		{Legacy, own, errMissing, NFT, "", "backend legacy"},
	} {
		m := machine{nft: newSide(t, NFT, test.nft), legacy: newSide(t, Legacy, test.legacy), plainBackend: test.plain}
		s, says, err := m.choose(test.configured)
		if err != nil {
			says = err.Error()
		}
		if (s == nil) != (test.want == "") || s != nil && s.backend != test.want || !strings.Contains(says, test.says) {
			t.Errorf("%+v: %v, %q", test, s, says)
		}
	}
}

// K11, K13: the messages of the tools that mean a lack of support, a refusal or a lock, with what to do. After any other
// message, the tool is run again.
func TestExplain(t *testing.T) {
	t.Parallel()
	for message, test := range map[string]struct {
		want   error
		advice string
	}{
		"Another app is currently holding the xtables lock. Stopped waiting after 5s.":                                       {nil, "fuser -v"},
		"iptables v1.8.9 (nf_tables): Could not fetch rule set generation id: Permission denied (you must be root)":          {errRefused, ""},
		"ip6tables-restore v1.8.9: can't initialize ip6tables table: Address family not supported by protocol":               {errMissing, "the other family"},
		"# Table `nat' is incompatible, use 'nft' tool.":                                                                     {errRefused, "a table of another name"},
		"iptables-restore: can't initialize iptables table `raw': Table does not exist (do you need to insmod?)":             {errMissing, "modprobe"},
		"Warning: Extension CT revision 0 not supported, missing kernel module?":                                             {errMissing, "modprobe"},
		"iptables-restore v1.8.9 (nf_tables): unknown option \"--zone-orig\"":                                                {errMissing, "extensions"},
		"iptables-restore: Couldn't load match `comment':No such file or directory":                                          {errMissing, "extensions"},
		"iptables-restore v1.8.9 (nf_tables): line 12: RULE_APPEND failed (No such file or directory): rule in chain OUTPUT": {errMissing, "modprobe"},
		"iptables-restore: line 12 failed":                                                                                   {errMissing, "modprobe"},
		"iptables/1.8.9 Failed to initialize nft: Protocol not supported":                                                    {errMissing, "nf_tables"},
		"RULE_APPEND failed (Device or resource busy)":                                                                       {nil, "Device or resource busy"},
		"Resource temporarily unavailable.":                                                                                  {nil, "Resource temporarily unavailable."},
		"":                                                                                                                   {nil, "running iptables-restore: a failure"},
	} {
		failure := errors.New("a failure")
		err := explain("iptables-restore", failure, message+"\n")
		if !errors.Is(err, failure) || test.want != nil && !errors.Is(err, test.want) || !strings.Contains(err.Error(), test.advice) {
			t.Errorf("%q: %v", message, err)
		}
		if temporary(err) != (test.want == nil) {
			t.Errorf("%q: temporary is %v", message, temporary(err))
		}
	}
}

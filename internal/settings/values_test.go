package settings_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/nametap/nametap/internal/settings"
)

// side is a value that reads and writes itself.
type side string

func (s side) MarshalText() ([]byte, error) { return []byte(s), nil }

func (s *side) UnmarshalText(text []byte) error {
	if string(text) != "left" && string(text) != "right" {
		return errors.New("want left or right")
	}
	*s = side(text)
	return nil
}

// R7: values of every kind are written as they are read, their default is what their variable
// holds, and a malformed value changes nothing.
func TestValues(t *testing.T) {
	wait, stale, count, size, memory := time.Minute, time.Hour, 7, 64<<20, 0
	open, closed, way, ports, zone := true, false, side("left"), []uint16{53}, uint16(5)
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	g := settings.NewGroup(flags, "Test")
	g.Var(settings.Duration(&wait, settings.ZeroIsZero), "wait", "")
	g.Var(settings.Duration(&stale, settings.ZeroIsNone), "stale", "")
	g.Var(settings.Int(&count, settings.ZeroRefused), "count", "")
	g.Var(settings.Bytes(&size, settings.ZeroRefused), "size", "")
	g.Var(settings.Bytes(&memory, settings.ZeroIsNone), "memory", "")
	g.Bool(&open, "open", "")
	g.Negated(&closed, "fail-open", "")
	g.Text(&way, "way", "")
	g.Var(settings.List(&ports, settings.ParseUint[uint16]), "port", "")
	g.Var(settings.Uint(&zone), "zone", "")
	for _, test := range []struct {
		name, before string
		good         map[string]string // to what is written
		bad          map[string]string // to what the error says
	}{
		{"wait", "1m0s", map[string]string{"0s": "0s", "300ms": "300ms"}, map[string]string{"5": "unit", "-1s": "no negative"}},
		{"stale", "1h0m0s", map[string]string{"0": "0s", "2h": "2h0m0s"}, map[string]string{"soon": "unit"}},
		{"count", "7", map[string]string{"9": "9", "1_000": "1000", "0x10": "16"}, map[string]string{"0": "more than 0", "-1": "no negative", "many": "whole number"}},
		{"size", "64MiB", map[string]string{"2048": "2KiB", "3MiB": "3MiB", "5": "5"}, map[string]string{"0": "more than 0", "64MB": "KiB or MiB", "": "bytes"}},
		{"memory", "0", map[string]string{"1KiB": "1KiB", "0": "0"}, map[string]string{"-1": "no negative"}},
		{"open", "true", map[string]string{"false": "false", "1": "true"}, map[string]string{"perhaps": "true or false"}},
		{"fail-open", "true", map[string]string{"false": "false"}, map[string]string{"perhaps": "true or false"}},
		{"way", "left", map[string]string{"right": "right"}, map[string]string{"up": "left or right"}},
		{"port", "[53]", map[string]string{"1": "[1]"}, map[string]string{"65536": "0 to 65535", "1,x": `"x": want`}},
		{"zone", "5", map[string]string{"0": "0", "65535": "65535", "0x10": "16"}, map[string]string{"-1": "0 to 65535", "65536": "0 to 65535"}},
	} {
		flag := flags.Lookup(test.name)
		if flag.DefValue != test.before {
			t.Errorf("%s: the default is %s, want %s", test.name, flag.DefValue, test.before)
		}
		for text, want := range test.bad {
			if err := flag.Value.Set(text); err == nil || !strings.Contains(err.Error(), want) || flag.Value.String() != test.before {
				t.Errorf("%s=%s: error %v, value %s", test.name, text, err, flag.Value)
			}
		}
		for text, want := range test.good {
			list, isList := flag.Value.(pflag.SliceValue)
			var err error
			if isList {
				err = list.Replace([]string{text})
			} else {
				err = flag.Value.Set(text)
			}
			if err != nil || flag.Value.String() != want {
				t.Errorf("%s=%s: error %v, value %s, want %s", test.name, text, err, flag.Value, want)
			}
		}
	}
	if err := flags.Parse([]string{"--stale=0", "--memory=0", "--fail-open=false", "--open", "--port=1,2", "--port=3"}); err != nil {
		t.Fatal(err)
	}
	if stale >= 0 || memory >= 0 || !closed || !open || len(ports) != 4 {
		t.Errorf("stale %v, memory %v, closed %v, open %v, ports %v", stale, memory, closed, open, ports)
	}
}

// The help has settings below their headings, after flags without a heading.
func TestUsages(t *testing.T) {
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags.SortFlags = false
	addr, list := "localhost:53", []string{}
	settings.NewGroup(flags, "DNS").String(&addr, "dns-addr", "listen on `host:port`").Env("DNS_PROXY_ADDR")
	settings.NewGroup(flags, "Nameservers").Var(settings.List(&list, settings.ParseString), "upstream", "`server` to ask")
	flags.Bool("verbose", false, "say more")
	want := "\nFlags:\n      --verbose   say more\n" +
		"\nDNS:\n      --dns-addr host:port   listen on host:port [DNS_PROXY_ADDR] (default \"localhost:53\")\n" +
		"\nNameservers:\n      --upstream server   server to ask\n"
	if got := settings.Usages(flags); got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
}

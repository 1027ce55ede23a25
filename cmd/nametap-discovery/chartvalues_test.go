package main

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/nametap/nametap/discovery"
	"github.com/nametap/nametap/inject"
)

// TestChartValues checks that the chart and the programs judge values alike: what the chart accepts, injection,
// nametap-discovery and the API server accept.
func TestChartValues(t *testing.T) { // P9
	text, err := os.ReadFile("../../deploy/chart/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	type rule struct {
		Pattern   string
		MaxLength int
		Not       *struct{ Pattern string }
		AnyOf     []struct{ Pattern string }
	}
	var schema struct{ Definitions map[string]json.RawMessage }
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	long := strings.Repeat("a", 63)
	for name, test := range map[string]struct {
		right, wrong []string
		read         map[string]func(value string) error
	}{
		"domain": {
			[]string{"cluster.local", "a", "1.5", "_a.b_c", long + ".b", strings.Repeat(long+".", 3) + long[:61]},
			[]string{".", "a..b", ".a", "a.", "*.a", "-a", "a-.b", "a b", "a\n", "\u00e4", long + "a", strings.Repeat(long+".", 3) + long[:62]},
			map[string]func(string) error{
				"injection": func(value string) error { return inject.Config{ClusterDomain: value}.Check() },
				"nametap-discovery": func(value string) error {
					_, err := discovery.New(discovery.Config{ConfigDir: dir, ClusterDomain: value})
					return err
				},
			},
		},
		"hostPort": {
			[]string{"", "istiod.istio-system.svc:15012", "a.:1", "192.0.2.1:65535", "[fd00::1]:15012", "[::ffff:192.0.2.1]:1"},
			[]string{"a", "a:", ":1", "a:0", "a:01", "a:65536", "a:+1", "a..b:1", "fd00::1:15012", "[a]:1", "[192.0.2.1]:1", "[fd00::1%eth0]:1", "[fd00::1]", "[:::]:1", "a b:1", "a:1\n", long + "a:1"},
			map[string]func(string) error{"injection": func(value string) error { return inject.Config{ControlPlane: value}.Check() }},
		},
		"address": {
			[]string{"10.96.0.10", "fd00:96::a", "::ffff:10.0.0.1", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:192.0.2.1"},
			[]string{"", "999.1.1.1", "1.2.3", "1.2.3.4.5", "01.2.3.4", "a", "1.2.3.4:53", "fe80::1%eth0", "1::2::3", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7:192.0.2.1", ":::", "12345::", "127.0.0.1", "::1", "::", "0:0:0:0:0:0:0:1", "0.0.0.0", "224.0.0.1", "ff02::fb", "::ffff:127.0.0.1", "::ffff:7f00:1"},
			map[string]func(string) error{"injection": func(value string) error {
				return inject.Config{Mode: inject.Resolv, Nameservers: []string{value}}.Check()
			}},
		},
		"registry": {
			[]string{"", "a", "registry.example.com:5000/a/b_c", "[fd00::1]:5000/a", strings.Repeat("a", 200)},
			[]string{"-a", "_a", "a/", "/a", "a b", "[fd00::1]/a", "a:b", strings.Repeat("a", 201)},
			map[string]func(string) error{"injection": func(value string) error {
				if strings.HasSuffix(value, "/") || len(value) > 200 { // the name of the image follows
					return errors.New("too long, or a slash at the end")
				}
				rest := strings.TrimPrefix("/"+strings.Repeat("a", 100)+":"+strings.Repeat("1", 128)+"@sha256:"+strings.Repeat("0", 64), strings.Repeat("/", max(0, 1-len(value))))
				return inject.Config{Image: value + rest}.Check()
			}},
		},
		"clusterID": {
			[]string{"Kubernetes", "a b \u00e4", strings.Repeat("\u00e4", 253)},
			[]string{"a\tb", "a\x7f", strings.Repeat("a", 254)},
			map[string]func(string) error{"injection": func(value string) error { return inject.Config{ClusterID: value}.Check() }},
		},
		"name": {
			[]string{"a", "a-b.c", "1", strings.Repeat("a", 253)},
			[]string{"A", "a_b", "-a", "a-", "a b", "\u00e4", strings.Repeat("a", 254)},
			map[string]func(string) error{
				"rootCert":          func(value string) error { return inject.Config{RootCert: value}.Check() },
				"ignoredNamespaces": func(value string) error { return inject.Config{IgnoredNamespaces: []string{value}}.Check() },
				"imagePullSecrets":  func(value string) error { return inject.Config{ImagePullSecrets: []string{value}}.Check() },
			},
		},
		"amount": {
			[]string{"", "10m", "1", "1.5", "0.5", "2k", "999999999999999"},
			[]string{"0", "0m", "0.0", "-1", "m", "1 ", "1e", "1KB", "1..5"},
			map[string]func(string) error{"injection": func(value string) error {
				return inject.Config{Resources: inject.Resources{Requests: inject.Amounts{"cpu": value}}}.Check()
			}},
		},
		"cidr": {
			[]string{"192.0.2.0/24", "0.0.0.0/0", "10.0.0.1/32", "fd00::/8", "::/0", "fd00::1/128"},
			[]string{"", "192.0.2.0", "192.0.2.0/33", "192.0.2.0/024", "999.0.0.0/8", "10.0.0/8", "fd00::/129", "fd00:/8", "/8", "vm.example.com/8"},
			map[string]func(string) error{"the API server": func(value string) error {
				_, err := netip.ParsePrefix(value)
				return err
			}},
		},
	} {
		var got rule
		if err := json.Unmarshal(schema.Definitions[name], &got); err != nil {
			t.Fatal(err)
		}
		if got.AnyOf != nil {
			got.Pattern = got.AnyOf[len(got.AnyOf)-1].Pattern
		}
		pattern, except := regexp.MustCompile(got.Pattern), regexp.MustCompile(`^\b$`) // matches nothing
		if got.Not != nil {
			except = regexp.MustCompile(got.Not.Pattern)
		}
		accepts := func(value string) bool {
			return pattern.MatchString(value) && (got.MaxLength == 0 || utf8.RuneCountInString(value) <= got.MaxLength) && !except.MatchString(value)
		}
		for value, right := range judged(test.right, test.wrong) {
			if accepts(value) != right {
				t.Errorf("%s %q: accepted by the chart is %v", name, value, !right)
			}
			for reader, read := range test.read {
				if err := read(value); (err == nil) != right {
					t.Errorf("%s %q: %s says %v", name, value, reader, err)
				}
			}
		}
	}
}

// judged returns whether values are right.
func judged(right, wrong []string) map[string]bool {
	all := map[string]bool{}
	for _, value := range right {
		all[value] = true
	}
	for _, value := range wrong {
		all[value] = false
	}
	return all
}

package egress

import (
	"strings"
	"testing"
)

// E15: on a host whose only way out is an HTTP proxy, tinyproxy, mail and web servers are reached through it
// by CONNECT. The mail server speaks first. The proxy resolves the names.
func TestProxy(t *testing.T) {
	w := newWorld(t, "--egress-proxy", gateway+":8888")
	w.startMail()
	cert := w.startWeb("")
	conf := w.Write("tinyproxy.conf", "Port 8888\nListen "+gateway+"\nTimeout 60\nConnectPort 25\nConnectPort 443\nLogLevel Info\n")
	proxy := w.serve("tinyproxy", w.withResolvConf("", "tinyproxy", "-d", "-c", conf)...)
	w.await("8888", gateway)
	w.Exec("ip", "route", "replace", "default", "dev", "lo")
	w.Exec("ip", "-6", "route", "replace", "default", "dev", "lo")

	for _, options := range []string{"", "no-aaaa"} {
		got, vip := w.greeting(options, mail, "25")
		if want := "220 " + mail + " ESMTP Exim"; !strings.HasPrefix(got, want) {
			t.Errorf("%s greets with %q, want %q", vip, got, want)
		}
		for _, site := range []string{siteA, siteB} {
			got := w.client(options, "curl", "--silent", "--show-error", "--max-time", "50", "--cacert", cert, "https://"+site+"/")
			if want := site + " " + site + " HTTP/2.0\n"; got != want {
				t.Errorf("curl of %s, options %q: %q, want %q", site, options, got, want)
			}
		}
	}
	for _, want := range []string{"CONNECT " + mail + ":25 ", "CONNECT " + siteA + ":443 ", "CONNECT " + siteB + ":443 "} {
		if proxy.Logged(want) == 0 {
			t.Errorf("want %q in the log of the proxy:\n%s", want, proxy.Text())
		}
	}
}

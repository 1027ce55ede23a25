package inject

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// settingKinds has the settings of `nametap agent` that Config.Settings may have. For the name of each flag, it has
// the kind of the value as the flag declares it, with its bounds, or the permitted values. With any other setting or
// value, the agent would not start, and its pod would have no DNS.
var settingKinds = map[string]string{ //nolint:gochecknoglobals // a constant
	"before-sync": "forward|hold|servfail", "bypass": "strings", "ca-addr": "string",
	"cache-size": "bytes", "capture-agent-gid": "strings",
	"capture-agent-uid": "strings", "capture-enabled": "bool",
	"capture-exclude-cidr": "strings", "capture-exclude-gid": "strings", "capture-exclude-interface": "strings",
	"capture-exclude-uid": "strings", "capture-fail-open": "bool",
	"capture-host-network": "bool", "capture-resolved": "bool",
	"capture-servers": "all|resolv-conf", "capture-virtual-interface": "strings", "capture-wait": "duration", "config": "string",
	"dns-addr": "string", "dns-auto-allocate": "bool", "dnstap": "receiver", "drain": "duration",
	"egress": "bool", "egress-addr": "string",
	"egress-idle-timeout": "duration>0", "egress-mark": "int 0 to 4294967295",
	"egress-proxy": "string", "egress-source": "strings", "instance-ip": "string", "labels-file": "string",
	"local-only": "strings", "log-format": "text|json", "log-level": "level",
	"mesh-config": "string", "namespace": "string", "pod-name": "string", "query-log": "off|failed|all",
	"resolv-conf": "string", "serve-stale": "duration", "service-account": "string", "state-dir": "string",
	"trust-domain": "string", "ttl": "ttl", "upstream-order": "strict|fastest",
	"upstream-root-ca": "string", "upstream-timeout": "duration>0", "workload-cert": "auto|on|off",
	"xds-cert": "string", "xds-key": "string", "xds-plaintext": "bool", "xds-root-ca": "string",
	"xds-server-name": "string", "xds-token-file": "string",
}

// reserved has the settings that Config.Settings must not have, because they follow from other fields or from the pod.
// The value of a setting says what it follows from.
var reserved = map[string]string{ //nolint:gochecknoglobals // a constant
	"xds-addr": "controlPlane", "cluster-id": "clusterID", "domain": "clusterDomain", "upstream": "nameservers",
	"status-addr": "whether Istio's sidecar is in the pod", "capture": "mode", "supervise": "mode",
}

// checkSettings returns an error that names a setting that the agent would refuse.
func checkSettings(settings map[string]string) error {
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		value := settings[name]
		kind, known := settingKinds[name]
		switch origin := reserved[name]; {
		case origin != "":
			return fmt.Errorf("settings: %.100q cannot be set here, because it follows from: %s", name, origin)
		case !known:
			return fmt.Errorf("settings: %.100q: want the name of a flag of `nametap agent`, without --%s", name, similar(name))
		}
		if err := checkKind(kind, value); err != nil {
			return fmt.Errorf("settings: %s: %.100q: %w", name, value, err)
		}
	}
	return nil
}

// similar returns a question that names the setting whose name is most similar to name; "" if none is similar.
func similar(name string) string {
	name = strings.ReplaceAll(strings.TrimPrefix(strings.ToLower(strings.TrimLeft(name, "-")), "nametap_"), "_", "-")
	if len(name) > maxName {
		return ""
	}
	best, least := "", 3 // a name with 3 mistakes or more is another word
	for _, candidate := range slices.Sorted(maps.Keys(settingKinds)) {
		for _, short := range []string{candidate, strings.TrimPrefix(candidate, "capture-")} {
			if d := distance(name, short); d < least {
				best, least = candidate, d
			}
		}
	}
	if best == "" {
		return ""
	}
	return ": did you mean " + best + "?"
}

// distance returns how many characters have to be inserted, removed or replaced to turn a into b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0]++
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal, row[j+1] = row[j+1], min(replaced, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// receiver is the form of a receiver of dnstap.
var receiver = regexp.MustCompile(`^(|unix:///[!-~]{1,106}|tcp://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))$`)

// maxTTL is the longest TTL of DNS (RFC 2181, section 8).
const maxTTL = math.MaxInt32 * time.Second

// checkKind returns an error unless value is of the given kind. The error says which values are.
func checkKind(kind, value string) error {
	name, bounds, _ := strings.Cut(kind, " ")
	name, positive := strings.CutSuffix(name, ">0")
	switch name {
	case "string", "strings":
		return nil
	case "receiver":
		if !receiver.MatchString(value) {
			return errors.New("want unix:///PATH or tcp://HOST:PORT")
		}
	case "bool":
		if _, err := strconv.ParseBool(value); err != nil {
			return errors.New("want true or false")
		}
	case "duration", "ttl":
		return checkDuration(name, value, positive)
	case "int":
		return checkInt(value, positive, bounds)
	case "bytes":
		if _, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSuffix(value, "KiB"), "MiB"), 10, 32); err != nil {
			return errors.New("want a number of bytes, alone or with KiB or MiB, such as 64MiB")
		}
	case "level":
		if new(slog.Level).UnmarshalText([]byte(value)) != nil {
			return errors.New("want debug, info, warn or error")
		}
	default:
		if values := strings.Split(kind, "|"); !slices.Contains(values, value) {
			return fmt.Errorf("want %s or %s", strings.Join(values[:len(values)-1], ", "), values[len(values)-1])
		}
	}
	return nil
}

// checkDuration is checkKind for a duration or a TTL.
func checkDuration(kind, value string, positive bool) error {
	d, err := time.ParseDuration(value)
	switch {
	case err != nil || d < 0:
		return errors.New("want a duration with its unit, such as 300ms, 5s or 2m")
	case kind == "ttl" && (d < time.Second || d > maxTTL):
		return fmt.Errorf("want 1s to %s", maxTTL)
	}
	return above0(d > 0 || !positive)
}

// checkInt is checkKind for a number. bounds are as in "0 to 65535"; "" means none.
func checkInt(value string, positive bool, bounds string) error {
	least, most, bounded := strings.Cut(bounds, " to ")
	if !bounded {
		n, err := strconv.ParseInt(value, 0, strconv.IntSize)
		if err != nil || n < 0 {
			return errors.New("want a whole number")
		}
		return above0(n > 0 || !positive)
	}
	n, err := strconv.ParseUint(value, 0, 64)
	from, _ := strconv.ParseUint(least, 10, 64) // bounds has two numbers
	to, _ := strconv.ParseUint(most, 10, 64)
	if err != nil || n < from || n > to {
		return fmt.Errorf("want a whole number from %s", bounds)
	}
	return nil
}

// above0 returns an error if ok is false. The caller sets ok if the value is above 0, or if it may be 0.
func above0(ok bool) error {
	if ok {
		return nil
	}
	return errors.New("want more than 0")
}

// variable returns the environment variable of a setting.
func variable(setting string) string {
	return "NAMETAP_" + strings.ToUpper(strings.ReplaceAll(setting, "-", "_"))
}

/* tools/toml_file.cpp - the only C++ of the project: a border around toml++. */
#include "tools/toml_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#define TOML_EXCEPTIONS  0
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

extern "C" {
#include "base/log.h"
}

namespace {
struct Item {
    std::string key, text;
    sw_toml_type type = SW_TOML_OTHER;
    int line = 0;
};

std::string print_real(double value) {
    char text[64];
    snprintf(text, sizeof(text), "%.17g", value);
    return text;
}

/* An array whose elements are all strings without a comma, which the joined form could not hold. */
bool join_strings(const toml::array &array, std::string &text) {
    for (const toml::node &node : array) {
        const auto *string = node.as_string();
        if (!string || string->get().find(',') != std::string::npos) return false;
        if (!text.empty()) text += ',';
        text += string->get();
    }
    return !array.empty();
}

Item make_item(std::string_view key, const toml::node &node) {
    Item item;
    item.key = key;
    item.line = static_cast<int>(node.source().begin.line);
    if (const auto *string = node.as_string()) {
        item.type = SW_TOML_STRING;
        item.text = string->get();
    } else if (const auto *integer = node.as_integer()) {
        item.type = SW_TOML_INTEGER;
        item.text = std::to_string(integer->get());
    } else if (const auto *real = node.as_floating_point()) {
        item.type = SW_TOML_REAL;
        item.text = print_real(real->get());
    } else if (const auto *boolean = node.as_boolean()) {
        item.type = SW_TOML_BOOLEAN;
        item.text = boolean->get() ? "true" : "false";
    } else if (const auto *array = node.as_array()) {
        if (join_strings(*array, item.text)) item.type = SW_TOML_STRINGS;
    } else if (node.is_table()) {
        item.type = SW_TOML_TABLE;
    }
    return item;
}
} // namespace

struct sw_toml {
    std::vector<Item> items;
    std::vector<sw_toml_value> values;
};

int sw_toml_open(struct sw_toml **out, const char *path) {
    errno = 0;
    std::ifstream stream(path, std::ios::binary);
    std::stringstream text;
    if (stream) text << stream.rdbuf();
    if (!stream || (text.str().empty() && errno != 0)) { /* a folder opens, but cannot be read */
        const int ret = errno ? -errno : -EIO;
        sw_error("config: cannot read %s: %s", path, strerror(-ret));
        return ret;
    }
    const toml::parse_result result = toml::parse(text.str(), std::string_view(path));
    if (!result) {
        const toml::parse_error &error = result.error();
        const std::string what(error.description());
        sw_error("config: %s: line %d, column %d: %s", path,
                 static_cast<int>(error.source().begin.line),
                 static_cast<int>(error.source().begin.column), what.c_str());
        return -EINVAL;
    }
    auto *file = new (std::nothrow) sw_toml;
    if (!file) return -ENOMEM;
    for (const auto &[key, node] : result.table())
        file->items.push_back(make_item(key.str(), node));
    std::stable_sort(file->items.begin(), file->items.end(),
                     [](const Item &a, const Item &b) { return a.line < b.line; });
    for (const Item &item : file->items)
        file->values.push_back({item.key.c_str(), item.text.c_str(), item.type, item.line});
    *out = file;
    return 0;
}

void sw_toml_close(struct sw_toml *file) {
    delete file;
}

int sw_toml_count(const struct sw_toml *file) {
    return static_cast<int>(file->values.size());
}

const struct sw_toml_value *sw_toml_at(const struct sw_toml *file, int i) {
    return &file->values[static_cast<size_t>(i)];
}
